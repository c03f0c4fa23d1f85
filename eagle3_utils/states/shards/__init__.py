"""The store's files: samples to shards, the ledger, recovery and fsck."""
