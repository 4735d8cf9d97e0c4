"""Small models and data for trying things out."""
