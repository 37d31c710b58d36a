"""Keras flavours: thin optimizer bases, the only modules here that import Keras."""
