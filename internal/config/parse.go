package config

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Bounds on a file beside its size: the parser takes quadratic time in both.
const (
	maxTokens = 50_000
	maxDepth  = 64
)

// byteOrderMark is what some editors put first.
var byteOrderMark = []byte("\uFEFF")

// parse returns the file's values, or nil where it has none.
func parse(name string, data []byte) (*node, error) {
	data = bytes.TrimPrefix(data, byteOrderMark)
	if at, valid := validText(data); !valid {
		return nil, &PositionError{File: name, Line: at.line, Column: at.column, Err: errors.New("this is not UTF-8 text")}
	}
	tokens := lexer.Tokenize(string(data))
	if err := checkTokens(name, tokens); err != nil {
		return nil, err
	}
	file, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		return nil, syntaxError(name, err)
	}
	b := builder{name: name, anchors: map[string]*node{}}
	return b.file(file)
}

// validText returns where the first byte is that no text has.
func validText(data []byte) (place, bool) {
	at := place{1, 1}
	for len(data) > 0 {
		r, size := utf8.DecodeRune(data)
		if r == utf8.RuneError && size == 1 || r == 0 {
			return at, false
		}
		at.column++
		if r == '\n' {
			at = place{at.line + 1, 1}
		}
		data = data[size:]
	}
	return at, true
}

// syntaxError adds file, line and column to an error of the parser.
func syntaxError(name string, err error) error {
	syntax, ok := errors.AsType[yaml.Error](err)
	if !ok || syntax.GetToken() == nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return tokenError(name, syntax.GetToken(), errors.New(syntax.GetMessage()))
}

func tokenError(name string, t *token.Token, err error) error {
	return &PositionError{File: name, Line: t.Position.Line, Column: t.Position.Column, Err: err}
}

// checkTokens refuses what the parser would take for ever over, or would drop
// without a word, and what has no meaning here.
func checkTokens(name string, tokens token.Tokens) error {
	if len(tokens) > maxTokens {
		return tokenError(name, tokens[maxTokens], fmt.Errorf("the file has more than %d words and signs", maxTokens))
	}
	var g guard
	for _, t := range tokens {
		if err := g.check(t); err != nil {
			return tokenError(name, t, err)
		}
	}
	return nil
}

var (
	errSecondDocument = errors.New("a second document begins here; a file has one")
	errDirective      = errors.New("directives are not accepted")
	errTag            = errors.New("tags are not accepted; quotes make text of a number")
	errHalf           = errors.New("an escape is half a surrogate pair, which no text has")
	errDeep           = fmt.Errorf("nested deeper than %d", maxDepth)
)

// guard watches the tokens of a file go by.
type guard struct {
	// begun is true once the document has begun, ended once it has ended.
	begun, ended bool
	// brackets are open; dashes have begun lists in lists on this line. What
	// is nested by indentation costs the parser little.
	brackets, dashes int
}

func (g *guard) check(t *token.Token) error {
	switch t.Type {
	case token.CommentType:
		return nil
	case token.DirectiveType:
		return errDirective
	case token.TagType:
		return errTag
	case token.DoubleQuoteType:
		if strings.Count(t.Value, "\uFFFD") > len(replacementRune.FindAllString(t.Origin, -1)) {
			return errHalf
		}
	case token.DocumentEndType:
		g.ended = true
	}
	if t.Type == token.DocumentHeaderType && g.begun || t.Type != token.DocumentEndType && g.ended {
		return errSecondDocument
	}
	g.begun = true
	if g.nest(t); g.brackets+g.dashes > maxDepth {
		return errDeep
	}
	return nil
}

// replacementRune is U+FFFD as a file may write it. The lexer reads half a surrogate pair as that.
var replacementRune = regexp.MustCompile(`(?i)\x{FFFD}|\\u(0000)?fffd`)

func (g *guard) nest(t *token.Token) {
	switch t.Type {
	case token.SequenceStartType, token.MappingStartType:
		g.brackets++
	case token.SequenceEndType, token.MappingEndType:
		g.brackets--
	case token.SequenceEntryType, token.MappingKeyType:
		g.dashes++
		return
	}
	g.dashes = 0
}

// Plain words that YAML 1.2 takes for more than text.
var (
	nullWord    = regexp.MustCompile(`^(~|null|Null|NULL|)$`)
	booleanWord = regexp.MustCompile(`^(true|True|TRUE|false|False|FALSE)$`)
	numberWord  = regexp.MustCompile(`^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$`)
)

// kindOf returns what a word without quotes is.
func kindOf(plain string) kind {
	switch {
	case nullWord.MatchString(plain):
		return null
	case booleanWord.MatchString(plain):
		return boolean
	case numberWord.MatchString(plain):
		return number
	}
	return text
}
