"""`tiles`: rendered overhead images at two dates with captions of the changes, in LEVIR-CC's official layout."""
