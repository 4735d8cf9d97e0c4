"""The checkpoint formats of Lightning and of Hugging Face Accelerate."""
