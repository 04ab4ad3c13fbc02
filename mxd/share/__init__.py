"""What leaves the house: whole models for transformers, layers for other tools and from them."""
