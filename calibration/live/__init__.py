"""`./dev validate`: fits and predictions held to a real engine on this machine."""
