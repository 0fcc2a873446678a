// Package config reads configuration files: YAML with typed values, in which
// unknown keys, duplicates and wrong types are refused with file, line, column
// and key, all of them at once.
//
//	doc, err := config.Load("mesh.yaml", &file)
//	err = doc.At(config.Path{"stages", "decode"}, err)   // points a later error at its place
//
// # What a file is
//
// One YAML 1.2 document of keys, with anchors, aliases and merge keys, without
// tags. What lies behind aliases counts each time against a bound of values, so
// a small file cannot become a large one.
//
// # What it is read into
//
// A struct whose fields carry the tag yaml:"key"; fields without one, or with
// "-", are not part of the file; embedded structs without one, and those with yaml:",inline",
// are read in place.
// yaml:"key,size" reads a size such as 4MiB into an int or int64, yaml:"key,path" a path,
// or a list of paths, relative to the file's folder. Fields are bool, whole numbers, floats, strings,
// time.Duration ("250ms") and types with UnmarshalText or UnmarshalYAML; pointers, slices and maps by
// string of these; structs; any for
// values of any kind; and Section for parts that are decoded later.
// A key without a value leaves its field as it is; for yaml:"key,value" it is an error.
//
// A string may be written as any scalar and is then that text: 010 stays "010".
// Everything else is strict: a number in quotes is not a number, 1.5 no whole one,
// and yes is not true.
//
// Doc and Section may be used concurrently.
package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
)

// Defaulter is a struct with defaults other than zero, which are set before its keys are
// read.
type Defaulter interface{ SetDefaults() }

// Doc is a file that has been read.
type Doc struct {
	name   string
	folder string
	// root is nil where the file is empty.
	root *node
	// unread are the keys that Load could not read.
	unread []string
}

// maxFile bounds a configuration file, in bytes.
const maxFile = 1 << 20

// Load reads the file into the struct that into points to.
func Load(path string, into any) (*Doc, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return Parse(path, filepath.Dir(path), data, into)
}

// Parse is Load of bytes. The name is for messages, and paths are relative to the folder.
func Parse(name, folder string, data []byte, into any) (*Doc, error) {
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s: larger than %s", name, Bytes(maxFile))
	}
	root, err := parse(name, data)
	if err != nil {
		return nil, err
	}
	doc := &Doc{name: name, folder: folder, root: root}
	err = doc.decode(root, nil, into)
	for _, one := range splitJoined(err) {
		if at, ok := errors.AsType[*PositionError](one); ok {
			doc.unread = append(doc.unread, at.Key)
		}
	}
	return doc, err
}

// relative returns a path of the file as one of the process.
func (d *Doc) relative(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(d.folder, path)
}

// decode reads a part of the file into the value that into points to.
func (d *Doc) decode(n *node, at Path, into any) error {
	if n == nil {
		return nil
	}
	target := reflect.ValueOf(into)
	if target.Kind() != reflect.Pointer || target.IsNil() {
		return fmt.Errorf("%s: %w into a %T", d.name, errTarget, into)
	}
	r := reader{doc: d}
	r.value(target.Elem(), n, at)
	return r.result()
}

// Section is a part of a file that is decoded later, once its type is known. The zero
// Section is one that the file does not have.
type Section struct {
	doc  *Doc
	node *node
	path Path
}

// Decode reads the section as Load reads a file. A section that is not there,
// or is empty, leaves everything as it is.
func (s Section) Decode(into any) error {
	if s.doc == nil {
		return nil
	}
	return s.doc.decode(s.node, s.path, into)
}

// At points an error at the section, or at the key in it that the error begins
// with; see Doc.At.
func (s Section) At(err error) error {
	if s.doc == nil {
		return err
	}
	return s.doc.At(s.path, err)
}
