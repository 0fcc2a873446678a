// Package digits is an example mesh that reads handwritten digits in three
// stages: decode, classify, label. FS holds its files, for programs that show
// it without a checkout: mesh.yaml, the network digits.onnx, and fifty images
// of 32 by 32 grey pixels that the network was not trained on, named
// images/<index>-<digit>.png.
//
// README.md says where the data is from and how well the network does;
// train/train.py made the network and the images.
package digits

import "embed"

// FS holds the example's files. It is never written.
//
//go:embed digits.onnx images mesh.yaml
var FS embed.FS
