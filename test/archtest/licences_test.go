package archtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/licensecheck"
)

// permissive are the licences of what the product links. PATENTS of Go's own modules grants more.
var permissive = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "GooglePatentsFile"}

// weakCopyleft are modules whose own files stay under MPL-2.0, as they are linked unchanged.
const weakCopyleft = "github.com/hashicorp/"

// leastKnown is how much of a file is known text, in percent; a title and the names of its authors
// are the rest.
const leastKnown = 95

// checkLicence returns what keeps a file with licences from being linked, or nil.
func checkLicence(module string, text []byte) error {
	found := licensecheck.Scan(text)
	if len(found.Match) == 0 || found.Percent < leastKnown {
		return fmt.Errorf("%.0f %% of the file is a licence that is known, at least %d %% are needed", found.Percent, leastKnown)
	}
	for _, match := range found.Match {
		if !slices.Contains(permissive, match.ID) && (match.ID != "MPL-2.0" || !strings.HasPrefix(module, weakCopyleft)) {
			return fmt.Errorf("the licence %s is not one that the product may link", match.ID)
		}
	}
	return nil
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|patents|unlicense)`)

// licences returns the files with licences of a folder.
func licences(t *testing.T, folder string) (files []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if licenceName.MatchString(entry.Name()) && entry.Type().IsRegular() && !strings.HasSuffix(entry.Name(), ".go") {
			files = append(files, filepath.Join(folder, entry.Name()))
		}
	}
	return files
}

func TestLinkedModulesHavePermissiveLicences(t *testing.T) {
	t.Parallel()
	// The library, the program and the tensors; tests and tools are not linked.
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}\t{{$.Dir}}{{end}}{{end}}",
		".", "./services/cmd/stagemesh", "./sdk/go/...")
	list.Dir = repository
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	licensed, checked := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(string(out)) {
		words := strings.Split(strings.TrimSpace(line), "\t")
		if len(words) != 3 {
			continue
		}
		module, root := words[0], words[1]
		if !licensed[module] {
			licensed[module] = false // until a file is found
		}
		for folder := words[2]; strings.HasPrefix(folder, root) && !checked[folder]; folder = filepath.Dir(folder) {
			checked[folder] = true
			for _, file := range licences(t, folder) {
				text, err := os.ReadFile(file)
				if err == nil {
					err = checkLicence(module, text)
				}
				if err != nil {
					t.Errorf("%s: %s: %v", module, file, err)
				}
				licensed[module] = licensed[module] || folder == root
			}
		}
	}
	if len(licensed) < 50 {
		t.Errorf("only %d modules are linked", len(licensed))
	}
	for module, has := range licensed {
		if !has {
			t.Errorf("%s has no file with a licence", module)
		}
	}
}

// The files of the viewer of /docs come from a bundle of npm packages, which lists their licences
// in comments.
func TestViewerHasPermissiveLicences(t *testing.T) {
	t.Parallel()
	if err := checkLicence("", []byte(read(t, "internal/openapi/viewer/LICENSE"))); err != nil {
		t.Error(err)
	}
	bundled := strings.Split(read(t, "internal/openapi/viewer/swagger-ui-bundle.js.LICENSE.txt"), "/*!")[1:]
	if len(bundled) < 10 {
		t.Errorf("only %d packages are bundled", len(bundled))
	}
	for _, one := range bundled {
		if err := checkComment(one); err != nil {
			t.Errorf("%v: %.200s", err, one)
		}
	}
}

var (
	permissiveName = regexp.MustCompile(`(?i)\b(MIT|BSD-[23]-Clause|Apache[- ]license|ISC license)\b`)
	copyleftName   = regexp.MustCompile(`(?i)\b[AL]?GPL|GNU (\w+ )*general public|server side public|business source|commons clause|\bSSPL|\bBUSL|non-?commercial`)
)

// checkComment is checkLicence of a comment in a bundle.
func checkComment(text string) error {
	if name := copyleftName.FindString(text); name != "" {
		return fmt.Errorf("%s is not one that the product may contain", name)
	}
	if !permissiveName.MatchString(text) {
		return fmt.Errorf("no licence that is known")
	}
	return nil
}

func TestOtherLicencesAreRefused(t *testing.T) {
	t.Parallel()
	apache := read(t, "LICENSE")
	const mpl = "This Source Code Form is subject to the terms of the Mozilla Public License, v. 2.0. If a copy of the MPL was not distributed with this " +
		"file, You can obtain one at https://mozilla.org/MPL/2.0/."
	for name, text := range map[string]string{
		"nothing": "",
		"GPL": "This program is free software: you can redistribute it and/or modify it under the terms of the GNU General Public License as published by " +
			"the Free Software Foundation, either version 3 of the License, or (at your option) any later version.",
		"MPL of others":       mpl,
		"a text of one's own": "All rights reserved. You may look at it.",
		"a clause more":       apache + strings.Repeat("The software is not to be sold, nor offered as a service to others, by anybody. ", 30),
	} {
		if checkLicence("example.com/a", []byte(text)) == nil {
			t.Errorf("%s is taken", name)
		}
	}
	for module, text := range map[string]string{"example.com/a": apache, weakCopyleft + "a": mpl} {
		if err := checkLicence(module, []byte(text)); err != nil {
			t.Error(err)
		}
	}
	for _, text := range []string{"@license GPL-3.0", "GNU Lesser General Public License", "MIT, and AGPL for others", "(c) somebody"} {
		if checkComment(text) == nil {
			t.Errorf("%s is taken", text)
		}
	}
}
