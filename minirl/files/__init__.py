"""Files that are whole or absent, safetensors, and what must not be written into them."""
