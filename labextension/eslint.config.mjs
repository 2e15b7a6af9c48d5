// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
import js from '@eslint/js';
import prettier from 'eslint-config-prettier';
import a11y from 'eslint-plugin-jsx-a11y';
import hooks from 'eslint-plugin-react-hooks';
import typescript from 'typescript-eslint';

export default typescript.config(
  { ignores: ['lib', 'node_modules', '**/*.js', '**/*.mjs', 'ui-tests/results'] },
  js.configs.recommended,
  ...typescript.configs.strictTypeChecked,
  a11y.flatConfigs.strict,
  prettier,
  {
    languageOptions: {
      parserOptions: { project: './tsconfig.test.json' }
    },
    plugins: { 'react-hooks': hooks },
    rules: {
      ...hooks.configs.recommended.rules,
      // This is JupyterLab's own convention.
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], prefix: ['I'] }
      ],
      '@typescript-eslint/restrict-template-expressions': [
        'error',
        { allowNumber: true, allowBoolean: true }
      ],
      // `void promise` and namespaces of tokens are idioms of JupyterLab.
      '@typescript-eslint/no-confusing-void-expression': 'off',
      '@typescript-eslint/no-extraneous-class': 'off',
      '@typescript-eslint/no-namespace': 'off',
      curly: ['error', 'all'],
      eqeqeq: 'error'
    }
  },
  {
    files: ['**/__tests__/**', 'ui-tests/**'],
    rules: {
      '@typescript-eslint/no-non-null-assertion': 'off',
      // The first parameter of a Playwright fixture names the fixtures that it needs.
      // `{}` means that it needs none.
      'no-empty-pattern': ['error', { allowObjectPatternsAsParameters: true }]
    }
  }
);
