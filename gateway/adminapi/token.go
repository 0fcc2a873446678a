package adminapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Token is what callers have to know; the zero Token is none. It is kept as a
// digest, so that nothing can print it and all comparisons take the same time.
type Token struct {
	digest [sha256.Size]byte
	set    bool
}

// NewToken returns a token. It has at least one character, and all of them are
// visible ASCII.
func NewToken(text string) (Token, error) {
	if text == "" {
		return Token{}, errors.New("there is no token in it")
	}
	for _, r := range text {
		if r <= ' ' || r > '~' {
			return Token{}, errors.New("a token is one word of visible ASCII")
		}
	}
	return Token{digest: sha256.Sum256([]byte(text)), set: true}, nil
}

// maxToken bounds a file with a token, in bytes.
const maxToken = 4 << 10

// ReadToken reads a token from a file, without the white space around it.
func ReadToken(path string) (Token, error) {
	f, err := os.Open(path)
	if err != nil {
		return Token{}, err
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxToken+1))
	if err == nil && len(data) > maxToken {
		err = fmt.Errorf("larger than %d bytes", maxToken)
	}
	if err != nil {
		return Token{}, fmt.Errorf("%s: %w", path, err)
	}
	token, err := NewToken(strings.TrimSpace(string(data)))
	if err != nil {
		return Token{}, fmt.Errorf("%s: %w", path, err)
	}
	return token, nil
}

// is reports whether the text is the token.
func (t Token) is(text string) bool {
	digest := sha256.Sum256([]byte(text))
	return subtle.ConstantTimeCompare(digest[:], t.digest[:]) == 1
}
