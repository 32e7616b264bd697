"""A sparse VGG-16 on two unequal workers: our plan and SparsePipe's, predicted beside measured."""
