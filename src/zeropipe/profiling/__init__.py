"""Measures what the layers of a model and messages between ranks cost: what `zeropipe profile` stands on."""
