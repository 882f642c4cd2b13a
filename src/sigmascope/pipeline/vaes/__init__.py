"""The VAEs that can be asked to encode and decode, each behind one interface."""
