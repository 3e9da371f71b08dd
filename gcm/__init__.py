"""Global Configuration Manager: one leader and its standbys decide what runs where, and tell clients."""
