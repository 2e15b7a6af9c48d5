// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// Checks the types and runs eslint on one shared TypeScript program. Separately, each
// of them would read all declarations of JupyterLab and infer the types, which takes
// most of the time of both.
import { createProgram } from '@typescript-eslint/parser';
import { ESLint } from 'eslint';
import ts from 'typescript';

const program = createProgram('tsconfig.test.json', import.meta.dirname);
const faults = ts.getPreEmitDiagnostics(program);
process.stdout.write(
  ts.formatDiagnosticsWithColorAndContext(faults, {
    getCanonicalFileName: name => name,
    getCurrentDirectory: () => import.meta.dirname,
    getNewLine: () => '\n'
  })
);

const eslint = new ESLint({
  cwd: import.meta.dirname,
  overrideConfig: {
    languageOptions: { parserOptions: { project: null, programs: [program] } }
  }
});
const results = await eslint.lintFiles('.');
process.stdout.write((await eslint.loadFormatter('stylish')).format(results));

const found = results.reduce((sum, { errorCount, warningCount }) => {
  return sum + errorCount + warningCount;
}, faults.length);
process.exit(found ? 1 : 0);
