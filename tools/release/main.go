// Command release builds what a release consists of, from a clean commit, and publishes nothing:
// archives of the static program, images without an engine, the Helm chart, an SBOM, the packages of
// sdk/python and sdk/typescript, licences, notes and checksums. Two runs of one commit with one Go
// are equal byte by byte: all times are the commit's.
//
//	release -version v0.1.0 -out dist/v0.1.0 -sbom .../cyclonedx-gomod -python .../bin/python
//
// `make release` does that. It runs in the root of the repository.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r := release{log: func(format string, args ...any) { fmt.Fprintf(os.Stderr, "== "+format+"\n", args...) }}
	flag.StringVar(&r.version, "version", "", "the version, such as v0.1.0")
	flag.StringVar(&r.out, "out", "", "the folder to write; it is removed first")
	flag.StringVar(&r.sbom, "sbom", "", "the program cyclonedx-gomod")
	flag.StringVar(&r.python, "python", "", "a Python with requirements.txt")
	flag.Parse()
	if err := r.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// release is one run.
type release struct {
	version, out, sbom, python string
	log                        func(format string, args ...any)

	commit string
	at     time.Time
	// work is a temporary folder.
	work string
}

// platforms lists what archives are for; images are for Linux alone.
var platforms = []struct{ system, arch string }{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}}

var versionPattern = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-rc\.(0|[1-9]\d*))?$`)

func (r *release) run(ctx context.Context) (err error) {
	if !versionPattern.MatchString(r.version) {
		return fmt.Errorf("-version: %q is not a version such as v0.1.0: make release VERSION=v0.1.0", r.version)
	}
	if err := r.readCommit(ctx); err != nil {
		return err
	}
	if r.work, err = os.MkdirTemp("", "stagemesh-release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.work)) }()
	if err := errors.Join(os.RemoveAll(r.out), os.MkdirAll(r.out, 0o755)); err != nil {
		return err
	}
	changelog, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return err
	}
	notes, isReleased := notesOf(string(changelog), r.version)
	if !isReleased {
		r.log("CHANGELOG.md has no section %s; the notes are its section Unreleased", r.version)
	}
	if err := os.WriteFile(filepath.Join(r.out, "NOTES.md"), []byte(notes), 0o644); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{r.writePrograms, r.writeSBOM, r.writePython, r.writeChart, r.writeTypeScript} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return r.writeSums()
}

// readCommit reads the commit and its time, and fails if the tree differs from it.
func (r *release) readCommit(ctx context.Context) error {
	changed, err := r.output(ctx, nil, "git", "status", "--porcelain")
	if err != nil {
		return err
	}
	if len(changed) > 0 {
		return fmt.Errorf("a release is built of a commit, and these differ from it; commit or remove them:\n%s", changed)
	}
	out, err := r.output(ctx, nil, "git", "log", "-1", "--format=%H %ct")
	if err != nil {
		return err
	}
	commit, seconds, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	unix, err := strconv.ParseInt(seconds, 10, 64)
	r.commit, r.at = commit, time.Unix(unix, 0).UTC()
	return err
}

// output runs a command, with the environment besides this program's, and returns its output.
func (r *release) output(ctx context.Context, environment []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly", "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "CGO_ENABLED=0", "SOURCE_DATE_EPOCH="+strconv.FormatInt(r.at.Unix(), 10))
	cmd.Env = append(cmd.Env, environment...)
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(name), strings.Join(args, " "), err, &errOut, &out)
	}
	return out.Bytes(), nil
}

// notesOf returns the section of a version, or else the one of what is not released.
func notesOf(changelog, version string) (notes string, isReleased bool) {
	sections := strings.Split("\n"+changelog, "\n## ")
	for _, want := range []string{strings.TrimPrefix(version, "v"), "Unreleased"} {
		for _, section := range sections[1:] {
			title, text, _ := strings.Cut(section, "\n")
			if words := strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(title)); len(words) > 0 && strings.TrimPrefix(words[0], "v") == want {
				return strings.TrimSpace(text) + "\n", want != "Unreleased"
			}
		}
	}
	return "", false
}

// build builds the program for a platform.
func (r *release) build(ctx context.Context, system, arch string) (path string, err error) {
	path = filepath.Join(r.work, system+"-"+arch, "stagemesh")
	const linked = "github.com/stagemesh/stagemesh/internal/process."
	flags := fmt.Sprintf("-s -w -buildid= -X %sversion=%s -X %srevision=%s -X %sdate=%s", linked, r.version, linked, r.commit, linked, r.at.Format(time.RFC3339))
	_, err = r.output(ctx, []string{"GOOS=" + system, "GOARCH=" + arch}, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", path, "./services/cmd/stagemesh")
	return path, err
}

// writePrograms writes an archive for each platform, and an image for each of Linux.
func (r *release) writePrograms(ctx context.Context) error {
	licences, err := r.licences(ctx)
	if err != nil {
		return err
	}
	common := []file{{name: "THIRD_PARTY_LICENSES.txt", data: licences}}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		common = append(common, file{name: name, data: data})
	}
	native, err := r.build(ctx, runtime.GOOS, runtime.GOARCH)
	if err != nil {
		return err
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		script, err := r.output(ctx, nil, native, "completion", shell)
		if err != nil {
			return err
		}
		common = append(common, file{name: "completions/stagemesh." + shell, data: script})
	}
	for _, p := range platforms {
		r.log("%s/%s", p.system, p.arch)
		path, err := r.build(ctx, p.system, p.arch)
		if err != nil {
			return err
		}
		program, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("stagemesh_%s_%s_%s", r.version, p.system, p.arch)
		files := []file{{name: name + "/stagemesh", data: program, mode: 0o755}}
		for _, f := range common {
			f.name = name + "/" + f.name
			files = append(files, f)
		}
		archive, err := compress(files, r.at)
		if err == nil {
			err = os.WriteFile(filepath.Join(r.out, name+".tar.gz"), archive, 0o644)
		}
		if err == nil && p.system == "linux" {
			err = r.writeImage(program, common[0], p.arch)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)`)

// licences returns the licences of all that is linked: modules, Go's library, and the viewer of
// /docs. test/archtest checks which ones there are.
func (r *release) licences(ctx context.Context) ([]byte, error) {
	folders := map[string]string{}
	for _, p := range platforms {
		const format = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}{{end}}{{end}}"
		out, err := r.output(ctx, []string{"GOOS=" + p.system, "GOARCH=" + p.arch}, "go", "list", "-deps", "-f", format, "./services/cmd/stagemesh")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(out)) {
			if module, folder, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
				folders[module] = folder
			}
		}
	}
	root, err := r.output(ctx, nil, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	folders["Go's standard library"] = strings.TrimSpace(string(root))
	folders["the viewer of /docs"] = "internal/openapi/viewer"
	var names []string
	for name := range folders {
		names = append(names, name)
	}
	slices.Sort(names)
	var out bytes.Buffer
	for _, name := range names {
		entries, err := os.ReadDir(folders[name])
		if err != nil {
			return nil, err
		}
		found := 0
		for _, entry := range entries {
			if !entry.Type().IsRegular() || !licenceName.MatchString(entry.Name()) || strings.HasSuffix(entry.Name(), ".go") {
				continue
			}
			text, err := os.ReadFile(filepath.Join(folders[name], entry.Name()))
			if err != nil {
				return nil, err
			}
			found++
			fmt.Fprintf(&out, "==== %s: %s\n\n%s\n", name, entry.Name(), bytes.TrimSpace(text))
		}
		if found == 0 {
			return nil, fmt.Errorf("%s: %s has no file with a licence", name, folders[name])
		}
	}
	return out.Bytes(), nil
}

// writeSBOM writes the bill of materials of the program for Linux on amd64 in CycloneDX.
func (r *release) writeSBOM(ctx context.Context) error {
	r.log("SBOM")
	path := filepath.Join(r.work, "sbom.json")
	program := filepath.Join(r.work, "linux-amd64", "stagemesh")
	if _, err := r.output(ctx, nil, r.sbom, "bin", "-json", "-licenses", "-std", "-noserial", "-version", r.version, "-output", path, program); err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var bom map[string]any
	if err := json.Unmarshal(text, &bom); err != nil {
		return fmt.Errorf("the SBOM: %w", err)
	}
	if metadata, ok := bom["metadata"].(map[string]any); ok {
		metadata["timestamp"] = r.at.Format(time.RFC3339)
	}
	text, err = json.MarshalIndent(bom, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "stagemesh_"+r.version+"_sbom.cdx.json"), append(text, '\n'), 0o644)
}

// writePython writes the packages of sdk/python, built of a copy.
func (r *release) writePython(ctx context.Context) error {
	r.log("sdk/python")
	source, built := filepath.Join(r.work, "python"), filepath.Join(r.work, "python-dist")
	files, err := r.filesOf(ctx, "sdk/python")
	if err == nil {
		err = writeFiles(source, files)
	}
	if err != nil {
		return err
	}
	if _, err := r.output(ctx, nil, r.python, "-m", "build", "--no-isolation", "--outdir", built, source); err != nil {
		return err
	}
	entries, err := os.ReadDir(built)
	if err != nil {
		return err
	}
	var names []string
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(built, entry.Name()))
		if err == nil && strings.HasSuffix(entry.Name(), ".tar.gz") {
			data, err = normalise(data, r.at) // it has the times of the copy
		}
		if err == nil {
			names = append(names, filepath.Join(r.out, entry.Name()))
			err = os.WriteFile(names[len(names)-1], data, 0o644)
		}
		if err != nil {
			return err
		}
	}
	wheel := "stagemesh-" + strings.Replace(r.number(), "-rc.", "rc", 1) + "-"
	if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(filepath.Base(name), wheel) }) {
		return fmt.Errorf("sdk/python has another version, %s: set __version__ in sdk/python/stagemesh/__init__.py", filepath.Base(names[0]))
	}
	_, err = r.output(ctx, nil, r.python, append([]string{"-m", "twine", "check", "--strict"}, names...)...)
	return err
}

// writeChart writes the package of the Helm chart, whose version and image are the release's.
func (r *release) writeChart(ctx context.Context) error {
	r.log("chart")
	return r.writePackage(ctx, "deploy/helm/stagemesh", "stagemesh", "stagemesh-"+r.number()+".tgz", r.chartFile)
}

var (
	chartVersion = regexp.MustCompile(`(?m)^version: .*$`)
	chartImage   = regexp.MustCompile(`(?m)^appVersion: .*$`)
)

func (r *release) chartFile(f file) file {
	if f.name == "Chart.yaml" {
		f.data = chartVersion.ReplaceAll(f.data, []byte("version: "+r.number()))
		f.data = chartImage.ReplaceAll(f.data, []byte("appVersion: "+r.version))
	}
	return f
}

// writeTypeScript writes the package of sdk/typescript, with the name and the files of npm pack.
func (r *release) writeTypeScript(ctx context.Context) error {
	r.log("sdk/typescript")
	return r.writePackage(ctx, "sdk/typescript", "package", "stagemesh-client-"+r.number()+".tgz", r.typeScriptFile)
}

var npmVersion = regexp.MustCompile(`(?m)^  "version": ".*",$`)

func (r *release) typeScriptFile(f file) file {
	switch {
	case f.name == "package.json":
		f.data = npmVersion.ReplaceAll(f.data, []byte(`  "version": "`+r.number()+`",`))
	case f.name != "README.md" && f.name != "LICENSE" && !strings.HasPrefix(f.name, "dist/"):
		return file{}
	}
	return f
}

// number is the version without its v, as packages write it.
func (r *release) number() string { return strings.TrimPrefix(r.version, "v") }

// writePackage writes a gzipped tar of a folder, below root. Edit returns a file as it is packed, or
// one without a name to leave it out.
func (r *release) writePackage(ctx context.Context, folder, root, name string, edit func(file) file) error {
	in, err := r.filesOf(ctx, folder)
	if err != nil {
		return err
	}
	var files []file
	for _, f := range in {
		if f = edit(f); f.name != "" {
			f.name = root + "/" + f.name
			files = append(files, f)
		}
	}
	out, err := compress(files, r.at)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name), out, 0o644)
}

// filesOf returns the files of a folder that git tracks, as the commit has them, and in place of a link
// what it leads to.
func (r *release) filesOf(ctx context.Context, folder string) (out []file, err error) {
	listed, err := r.output(ctx, nil, "git", "ls-files", "-z", folder)
	if err != nil {
		return nil, err
	}
	for _, path := range strings.FieldsFunc(string(listed), func(c rune) bool { return c == 0 }) {
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return nil, err
		}
		target, err := filepath.EvalSymlinks(path)
		if err != nil {
			return nil, err
		}
		if data, err := os.ReadFile(target); err == nil {
			out = append(out, file{name: filepath.ToSlash(name), data: data})
			continue
		}
		linked, err := r.filesOf(ctx, target)
		if err != nil {
			return nil, err
		}
		if len(linked) == 0 {
			return nil, fmt.Errorf("%s leads to nothing that git has", path)
		}
		for _, f := range linked {
			f.name = filepath.ToSlash(name) + "/" + f.name
			out = append(out, f)
		}
	}
	return out, nil
}

// writeSums writes the checksums of all files, as sha256sum -c reads them.
func (r *release) writeSums() error {
	var sums bytes.Buffer
	err := filepath.WalkDir(r.out, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), filepath.Base(path))
		return err
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), sums.Bytes(), 0o644)
}
