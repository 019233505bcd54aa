"""End to end: a real cluster, real images, and the stories that users live on them."""
