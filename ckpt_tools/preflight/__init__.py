"""Go or no-go before a run: what a trainer's config asks for, compared with the model, the checkpoint and the machine.

Importing this package imports no torch.
"""
