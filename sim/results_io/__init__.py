"""Result files of servecast and of the benchmark clients, one module per format."""
