"""Matrix products with a fixed weight: plain, packed, and split over ranks."""
