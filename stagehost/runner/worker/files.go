package worker

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// lay puts the files that a folder does not have there: some systems remove what
// lies in a temporary one for long.
func lay(folder string, files fs.FS) error {
	if files == nil {
		return nil
	}
	return fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		to := filepath.Join(folder, filepath.FromSlash(path))
		if _, err := os.Stat(to); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		data, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		return os.WriteFile(to, data, 0o600)
	})
}
