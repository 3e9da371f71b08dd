"""Every byte that crosses a socket: types, encoders, parsers and limits, one file per conversation. Nothing here does IO."""
