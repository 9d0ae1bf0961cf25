"""Import the checkpoints that the authors of a method released."""
