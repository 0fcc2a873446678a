package config

// Section is a part of a file that somebody decodes later, who knows what it
// is. The zero Section is one that the file does not have.
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
