"""What measures, predicts and trains. It may import the rest of hippo;
nothing that serves imports it."""
