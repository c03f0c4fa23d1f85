"""What a server start consists of: checks before it, its flags, its processes, and who it is afterwards."""
