"""Loading Hugging Face models and running them on packed sequences."""
