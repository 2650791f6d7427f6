"""The engines that can be recorded, one file each, and the registry that finds them and those of other packages."""
