"""What `regard.inference.intervene` is made of: changes, our models' attention and Hugging Face's."""
