"""Request processors, a module a family: typed header in, a call of a service or of the store, typed reply out."""
