"""What a trained model is used for: generation, and looking inside."""
