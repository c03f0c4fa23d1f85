"""Chat data in whatever shape it comes, to records: read, convert, render, mask, refuse what is broken."""
