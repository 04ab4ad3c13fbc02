"""Exchange with other tools: whole models for transformers, layers to and from other tools' files."""
