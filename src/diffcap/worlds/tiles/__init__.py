"""`tiles`: rendered overhead images at two dates with captions of the changes, in files like those of LEVIR-MCI."""
