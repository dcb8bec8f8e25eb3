"""What decoding and models both need to know of media: which frames, sizes,
limits, file formats."""
