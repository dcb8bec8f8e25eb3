"""Code that the draft and the target service share: device thread, slots, streams, start-up."""
