"""SGLang: arguments, memory account and scheduler, as the engine itself has them."""
