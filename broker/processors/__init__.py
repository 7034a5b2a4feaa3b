"""Request processors, one module per family: typed header in, a call of a service or the store, typed reply out."""
