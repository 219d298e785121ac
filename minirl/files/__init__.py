"""Files that are complete or absent, JSON files and safetensors files."""
