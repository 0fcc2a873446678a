module github.com/stagemesh/stagemesh/sdk/go

go 1.26
