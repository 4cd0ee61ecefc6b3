"""ComfyUI: what it calls modules, and what it computes otherwise than the libraries that train."""
