"""What encoders do with a text or an image: a vector of it, its masked words, its class."""
