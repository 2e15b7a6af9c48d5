// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// These packages are published as ES modules, which jest cannot read without a
// transform.
const modules = [
  '@codemirror',
  '@jupyter',
  '@jupyterlab',
  '@lezer',
  '@microsoft',
  '@rjsf',
  'exenv-es6',
  'lib0',
  'marked',
  'nanoid',
  'y-protocols',
  'y-websocket',
  'yjs',
  'color.*',
  'd3.*',
  'internmap',
  'delaunator',
  'robust-predicates',
  'vscode-ws-jsonrpc',
  'style-mod',
  'crelt'
].join('|');

module.exports = {
  testEnvironment: 'jsdom',
  roots: ['<rootDir>/src'],
  testRegex: '/__tests__/.*\\.spec\\.tsx?$',
  setupFiles: ['<rootDir>/jest.setup.js'],
  setupFilesAfterEnv: ['<rootDir>/jest.console.js', '<rootDir>/jest.patience.js'],
  // A busy machine is slow, so the time-outs only have to end a hang.
  testTimeout: 60_000,
  moduleNameMapper: {
    '\\.(css|less)$': '<rootDir>/jest.empty.js',
    '\\.svg$': '<rootDir>/jest.svg.js'
  },
  transform: {
    '/node_modules/.*\\.m?js$': '<rootDir>/jest.modules.js',
    '\\.tsx?$': [
      'ts-jest',
      {
        tsconfig: {
          ...require('./tsconfig.test.json').compilerOptions,
          jsx: 'react',
          esModuleInterop: true,
          moduleResolution: 'node',
          target: 'ES2022',
          lib: ['DOM', 'DOM.Iterable', 'ES2022'],
          skipLibCheck: true,
          isolatedModules: true
        },
        diagnostics: false
      }
    ]
  },
  transformIgnorePatterns: [`/node_modules/(?!(${modules})/)`],
  clearMocks: true,
  restoreMocks: true
};
