"""serving: champions rank ads over HTTP (Ray Serve at the rim, everything else is plain Python)."""
