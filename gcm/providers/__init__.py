"""Where machines come from: one module per kind of provider, all behind provider.py's protocol."""
