"""How implementations are wrapped: declarations, base classes, and finding them by name."""
