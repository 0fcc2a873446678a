package config_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/stagemesh/stagemesh/mesh/config"
)

type holder struct{ Secret config.Secret }

func TestSecretIsNeverPrinted(t *testing.T) {
	t.Parallel()
	const text = "correct horse"
	secret := config.NewSecret(text)
	type inside struct {
		Public  config.Secret
		private config.Secret
		Pointer *config.Secret
	}
	in := inside{Public: secret, private: secret, Pointer: &secret}
	leaks := func(how, printed string) {
		t.Helper()
		for _, form := range []string{text, fmt.Sprintf("%x", text), fmt.Sprintf("%X", text), fmt.Sprintf("% x", text), fmt.Sprintf("%d", []byte(text))} {
			if strings.Contains(printed, form) {
				t.Errorf("%s prints %s", how, printed)
			}
		}
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d", "%t", "%p", "%T", "%c", "%U", "%10.3s"} {
		leaks(verb, fmt.Sprintf(verb, secret))
		leaks(verb+" of a struct", fmt.Sprintf(verb, in))
		leaks(verb+" of a pointer", fmt.Sprintf(verb, &in))
		leaks(verb+" of a list", fmt.Sprintf(verb, []inside{in}))
	}
	for name, marshal := range map[string]func(any) ([]byte, error){"json": json.Marshal, "yaml": yaml.Marshal, "xml": xml.Marshal} {
		out, err := marshal(holder{secret})
		if err != nil || !strings.Contains(string(out), "***") {
			t.Errorf("%s: got %s, %v", name, out, err)
		}
		leaks(name, string(out))
	}
	for name, handler := range map[string]func(*bytes.Buffer) slog.Handler{
		"text log": func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
		"json log": func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
	} {
		var out bytes.Buffer
		slog.New(handler(&out)).Info("hello", "secret", secret, "inside", in)
		leaks(name, out.String())
	}
	leaks("an error", fmt.Errorf("bad token %v", secret).Error())
	if secret.Reveal() != text {
		t.Errorf("it reveals %q", secret.Reveal())
	}
}

func TestNoSecretPrintsNothing(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]config.Secret{"zero": {}, "empty": config.NewSecret("")} {
		if s.Reveal() != "" || s.String() != "" || s != (config.Secret{}) {
			t.Errorf("%s: got %q and %q", name, s.Reveal(), s)
		}
	}
}

// What a message repeats of a file must not be a secret that stands there.
func TestMistakeAboutASecretDoesNotShowIt(t *testing.T) {
	t.Parallel()
	if _, _, err := parse("token: [hush]"); err == nil || strings.Contains(err.Error(), "hush") {
		t.Errorf("got %v", err)
	}
}
