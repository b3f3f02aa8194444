"""Three conversations that a tiny policy learns on a CPU in minutes; each environment is a file as users write it."""
