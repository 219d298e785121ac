"""Files that are complete or absent, safetensors files, and the removal of secrets from output."""
