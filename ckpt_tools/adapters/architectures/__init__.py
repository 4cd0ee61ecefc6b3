"""Model families whose adapters have names of their own: one file for each, and which of them an adapter is for."""
