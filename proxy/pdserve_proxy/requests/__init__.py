"""Takes in clients' requests: the bounds on bodies, the fields that are read of a body, and the admission queue."""
