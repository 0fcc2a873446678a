package config

import (
	"fmt"
	"io"
)

// Secret is text that is never printed, neither by itself nor inside of
// anything, whatever the verb or format; Reveal returns it.
type Secret struct {
	// A pointer, because fmt prints the fields of a struct that it cannot call
	// the methods of, and prints a pointer within as an address.
	text *string
}

const masked = "***"

// NewSecret returns a secret.
func NewSecret(text string) Secret {
	if text == "" {
		return Secret{}
	}
	return Secret{text: &text}
}

// Reveal returns the text.
func (s Secret) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// String returns a mask, or nothing where there is no secret.
func (s Secret) String() string {
	if s.text == nil {
		return ""
	}
	return masked
}

// Format implements fmt.Formatter: every verb prints the mask.
func (s Secret) Format(out fmt.State, _ rune) {
	// fmt takes no error.
	_, _ = io.WriteString(out, s.String())
}

// MarshalText returns a mask.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a secret.
func (s *Secret) UnmarshalText(data []byte) error {
	*s = NewSecret(string(data))
	return nil
}
