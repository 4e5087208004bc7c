module {
  func.func @main(%arg0: tensor<32x16xbf16>, %arg1: tensor<32x16xbf16>, %arg2: tensor<16x16xbf16>, %arg3: tensor<16x16xbf16>, %arg4: tensor<16x16xbf16>, %arg5: tensor<16x16xbf16>, %arg6: tensor<64x16xbf16>, %arg7: tensor<16x64xbf16>, %arg8: tensor<16x16xbf16>, %arg9: tensor<16x16xbf16>, %arg10: tensor<16x16xbf16>, %arg11: tensor<16x16xbf16>, %arg12: tensor<64x16xbf16>, %arg13: tensor<16x64xbf16>, %arg14: tensor<2x8xi64>, %arg15: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<-6.553600e+04> : tensor<bf16>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.bfloat16_1> : tensor<8x4xbf16>
    %cst_10 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.bfloat16> : tensor<8x4xbf16>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_12 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_13 = stablehlo.constant dense<0.000000e+00> : tensor<2x8x64xbf16>
    %cst_14 = arith.constant dense<2> : tensor<1xi64>
    %cst_15 = arith.constant dense<16> : tensor<1xi64>
    %cst_16 = arith.constant dense<9.9999999999999995E-7> : tensor<1xf64>
    %cst_17 = arith.constant dense<8> : tensor<1xi64>
    %cst_18 = arith.constant dense<2.8284271247461903> : tensor<1xf64>
    %cst_19 = arith.constant dense<15> : tensor<1xi64>
    %0 = "stablehlo.gather"(%arg0, %arg14) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xbf16>, tensor<2x8xi64>) -> tensor<2x8x16xbf16>
    %1 = stablehlo.convert %0 : tensor<2x8x16xbf16>
    %2 = stablehlo.convert %1 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %3 = stablehlo.convert %cst_14 : (tensor<1xi64>) -> tensor<1xf64>
    %4 = stablehlo.reshape %3 : (tensor<1xf64>) -> tensor<f64>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f64>) -> tensor<2x8x16xf64>
    %6 = stablehlo.power %2, %5 : tensor<2x8x16xf64>
    %7 = stablehlo.reduce(%6 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %8 = stablehlo.reshape %7 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %9 = stablehlo.convert %cst_15 : (tensor<1xi64>) -> tensor<1xf64>
    %10 = stablehlo.reshape %9 : (tensor<1xf64>) -> tensor<f64>
    %11 = stablehlo.broadcast_in_dim %10, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %12 = stablehlo.divide %8, %11 : tensor<2x8x1xf64>
    %13 = stablehlo.convert %cst_16 : tensor<1xf64>
    %14 = stablehlo.reshape %13 : (tensor<1xf64>) -> tensor<f64>
    %15 = stablehlo.broadcast_in_dim %14, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %16 = stablehlo.add %12, %15 : tensor<2x8x1xf64>
    %17 = stablehlo.rsqrt %16 : tensor<2x8x1xf64>
    %18 = stablehlo.broadcast_in_dim %17, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %19 = stablehlo.multiply %2, %18 : tensor<2x8x16xf64>
    %20 = stablehlo.convert %19 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %21 = stablehlo.convert %20 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %22 = stablehlo.power %21, %5 : tensor<2x8x16xf64>
    %23 = stablehlo.reduce(%22 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %24 = stablehlo.reshape %23 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %25 = stablehlo.divide %24, %11 : tensor<2x8x1xf64>
    %26 = stablehlo.add %25, %15 : tensor<2x8x1xf64>
    %27 = stablehlo.rsqrt %26 : tensor<2x8x1xf64>
    %28 = stablehlo.broadcast_in_dim %27, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %29 = stablehlo.multiply %21, %28 : tensor<2x8x16xf64>
    %30 = stablehlo.convert %29 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %31 = stablehlo.transpose %arg2, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %32 = stablehlo.reshape %30 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %33 = stablehlo.dot_general %32, %31, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %34 = stablehlo.reshape %33 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %35 = stablehlo.reshape %34 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %36 = stablehlo.transpose %arg3, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %37 = stablehlo.dot_general %32, %36, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %38 = stablehlo.reshape %37 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %39 = stablehlo.reshape %38 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %40 = stablehlo.transpose %arg4, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %41 = stablehlo.dot_general %32, %40, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %42 = stablehlo.reshape %41 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %43 = stablehlo.reshape %42 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %44 = stablehlo.slice %35 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %45 = stablehlo.slice %35 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %46 = stablehlo.reshape %cst_10 : (tensor<8x4xbf16>) -> tensor<1x8x4xbf16>
    %47 = stablehlo.reshape %46 : (tensor<1x8x4xbf16>) -> tensor<1x8x1x4xbf16>
    %48 = stablehlo.reshape %cst_9 : (tensor<8x4xbf16>) -> tensor<1x8x4xbf16>
    %49 = stablehlo.reshape %48 : (tensor<1x8x4xbf16>) -> tensor<1x8x1x4xbf16>
    %50 = stablehlo.broadcast_in_dim %47, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xbf16>) -> tensor<2x8x2x4xbf16>
    %51 = stablehlo.multiply %44, %50 : tensor<2x8x2x4xbf16>
    %52 = stablehlo.broadcast_in_dim %49, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xbf16>) -> tensor<2x8x2x4xbf16>
    %53 = stablehlo.multiply %45, %52 : tensor<2x8x2x4xbf16>
    %54 = stablehlo.subtract %51, %53 : tensor<2x8x2x4xbf16>
    %55 = stablehlo.multiply %45, %50 : tensor<2x8x2x4xbf16>
    %56 = stablehlo.multiply %44, %52 : tensor<2x8x2x4xbf16>
    %57 = stablehlo.add %55, %56 : tensor<2x8x2x4xbf16>
    %58 = stablehlo.concatenate %54, %57, dim = 3 : (tensor<2x8x2x4xbf16>, tensor<2x8x2x4xbf16>) -> tensor<2x8x2x8xbf16>
    %59 = stablehlo.slice %39 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %60 = stablehlo.slice %39 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %61 = stablehlo.multiply %59, %50 : tensor<2x8x2x4xbf16>
    %62 = stablehlo.multiply %60, %52 : tensor<2x8x2x4xbf16>
    %63 = stablehlo.subtract %61, %62 : tensor<2x8x2x4xbf16>
    %64 = stablehlo.multiply %60, %50 : tensor<2x8x2x4xbf16>
    %65 = stablehlo.multiply %59, %52 : tensor<2x8x2x4xbf16>
    %66 = stablehlo.add %64, %65 : tensor<2x8x2x4xbf16>
    %67 = stablehlo.concatenate %63, %66, dim = 3 : (tensor<2x8x2x4xbf16>, tensor<2x8x2x4xbf16>) -> tensor<2x8x2x8xbf16>
    %68 = stablehlo.convert %58 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x8xf64>
    %69 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f64>) -> tensor<2x8x2x8xf64>
    %70 = stablehlo.power %68, %69 : tensor<2x8x2x8xf64>
    %71 = stablehlo.reduce(%70 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %72 = stablehlo.reshape %71 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %73 = stablehlo.convert %cst_17 : (tensor<1xi64>) -> tensor<1xf64>
    %74 = stablehlo.reshape %73 : (tensor<1xf64>) -> tensor<f64>
    %75 = stablehlo.broadcast_in_dim %74, dims = [] : (tensor<f64>) -> tensor<2x8x2x1xf64>
    %76 = stablehlo.divide %72, %75 : tensor<2x8x2x1xf64>
    %77 = stablehlo.broadcast_in_dim %14, dims = [] : (tensor<f64>) -> tensor<2x8x2x1xf64>
    %78 = stablehlo.add %76, %77 : tensor<2x8x2x1xf64>
    %79 = stablehlo.rsqrt %78 : tensor<2x8x2x1xf64>
    %80 = stablehlo.broadcast_in_dim %79, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %81 = stablehlo.multiply %68, %80 : tensor<2x8x2x8xf64>
    %82 = stablehlo.convert %81 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xbf16>
    %83 = stablehlo.convert %67 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x8xf64>
    %84 = stablehlo.power %83, %69 : tensor<2x8x2x8xf64>
    %85 = stablehlo.reduce(%84 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %86 = stablehlo.reshape %85 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %87 = stablehlo.divide %86, %75 : tensor<2x8x2x1xf64>
    %88 = stablehlo.add %87, %77 : tensor<2x8x2x1xf64>
    %89 = stablehlo.rsqrt %88 : tensor<2x8x2x1xf64>
    %90 = stablehlo.broadcast_in_dim %89, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %91 = stablehlo.multiply %83, %90 : tensor<2x8x2x8xf64>
    %92 = stablehlo.convert %91 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xbf16>
    %93 = stablehlo.transpose %82, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %94 = stablehlo.transpose %92, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %95 = stablehlo.transpose %43, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %96 = stablehlo.transpose %94, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %97 = stablehlo.reshape %93 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %98 = stablehlo.reshape %96 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %99 = stablehlo.broadcast_in_dim %98, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %100 = stablehlo.dot_general %97, %99, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %101 = stablehlo.reshape %100 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %102 = stablehlo.convert %cst_18 : (tensor<1xf64>) -> tensor<1xbf16>
    %103 = stablehlo.reshape %102 : (tensor<1xbf16>) -> tensor<bf16>
    %104 = stablehlo.broadcast_in_dim %103, dims = [] : (tensor<bf16>) -> tensor<2x2x8x8xbf16>
    %105 = stablehlo.divide %101, %104 : tensor<2x2x8x8xbf16>
    %106 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %107 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %108 = stablehlo.divide %107, %106 : tensor<f64>
    %109 = stablehlo.ceil %108 : tensor<f64>
    %110 = stablehlo.convert %109 : (tensor<f64>) -> tensor<i64>
    %111 = stablehlo.reshape %110 : (tensor<i64>) -> tensor<1xi64>
    %112 = stablehlo.dynamic_iota %111, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %113 = stablehlo.multiply %112, %c_3 : tensor<8xi64>
    %114 = stablehlo.add %113, %c_2 : tensor<8xi64>
    %115 = stablehlo.reshape %114 : (tensor<8xi64>) -> tensor<1x8xi64>
    %116 = stablehlo.reshape %114 : (tensor<8xi64>) -> tensor<8x1xi64>
    %117 = stablehlo.broadcast_in_dim %115, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %118 = stablehlo.broadcast_in_dim %116, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %119 = stablehlo.subtract %117, %118 : tensor<8x8xi64>
    %120 = stablehlo.compare LE, %119, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %121 = stablehlo.broadcast_in_dim %120, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %122 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %123 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %124 = stablehlo.select %121, %122, %123 : tensor<8x8xi1>, tensor<8x8xf32>
    %125 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %126 = stablehlo.broadcast_in_dim %125, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %127 = stablehlo.compare EQ, %124, %126, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %128 = stablehlo.reshape %127 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %129 = stablehlo.broadcast_in_dim %128, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x2x8x8xi1>
    %130 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<bf16>) -> tensor<2x2x8x8xbf16>
    %131 = stablehlo.broadcast_in_dim %105, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %132 = stablehlo.select %129, %130, %131 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xbf16>
    %133 = stablehlo.convert %132 : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xf32>
    %134 = stablehlo.reduce(%133 init: %cst_12) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %135 = stablehlo.reshape %134 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %136 = stablehlo.broadcast_in_dim %135, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %137 = stablehlo.subtract %133, %136 : tensor<2x2x8x8xf32>
    %138 = stablehlo.exponential %137 : tensor<2x2x8x8xf32>
    %139 = stablehlo.reduce(%138 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %140 = stablehlo.reshape %139 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %141 = stablehlo.broadcast_in_dim %140, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %142 = stablehlo.divide %138, %141 : tensor<2x2x8x8xf32>
    %143 = stablehlo.convert %142 : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xbf16>
    %144 = stablehlo.reshape %143 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %145 = stablehlo.reshape %95 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %146 = stablehlo.broadcast_in_dim %145, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %147 = stablehlo.dot_general %144, %146, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %148 = stablehlo.reshape %147 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %149 = stablehlo.transpose %148, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x8x2x8xbf16>
    %150 = stablehlo.reshape %149 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x16xbf16>
    %151 = stablehlo.transpose %arg5, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %152 = stablehlo.reshape %150 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %153 = stablehlo.dot_general %152, %151, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %154 = stablehlo.reshape %153 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %155 = stablehlo.add %20, %154 : tensor<2x8x16xbf16>
    %156 = stablehlo.convert %155 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %157 = stablehlo.power %156, %5 : tensor<2x8x16xf64>
    %158 = stablehlo.reduce(%157 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %159 = stablehlo.reshape %158 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %160 = stablehlo.divide %159, %11 : tensor<2x8x1xf64>
    %161 = stablehlo.add %160, %15 : tensor<2x8x1xf64>
    %162 = stablehlo.rsqrt %161 : tensor<2x8x1xf64>
    %163 = stablehlo.broadcast_in_dim %162, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %164 = stablehlo.multiply %156, %163 : tensor<2x8x16xf64>
    %165 = stablehlo.convert %164 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %166 = stablehlo.transpose %arg6, dims = [1, 0] : (tensor<64x16xbf16>) -> tensor<16x64xbf16>
    %167 = stablehlo.reshape %165 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %168 = stablehlo.dot_general %167, %166, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x64xbf16>) -> tensor<16x64xbf16>
    %169 = stablehlo.reshape %168 : (tensor<16x64xbf16>) -> tensor<2x8x64xbf16>
    %170 = stablehlo.maximum %169, %cst_13 : tensor<2x8x64xbf16>
    %171 = stablehlo.convert %cst_14 : (tensor<1xi64>) -> tensor<1xbf16>
    %172 = stablehlo.reshape %171 : (tensor<1xbf16>) -> tensor<bf16>
    %173 = stablehlo.broadcast_in_dim %172, dims = [] : (tensor<bf16>) -> tensor<2x8x64xbf16>
    %174 = stablehlo.power %170, %173 : tensor<2x8x64xbf16>
    %175 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<16x64xbf16>) -> tensor<64x16xbf16>
    %176 = stablehlo.reshape %174 : (tensor<2x8x64xbf16>) -> tensor<16x64xbf16>
    %177 = stablehlo.dot_general %176, %175, contracting_dims = [1] x [0] : (tensor<16x64xbf16>, tensor<64x16xbf16>) -> tensor<16x16xbf16>
    %178 = stablehlo.reshape %177 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %179 = stablehlo.add %155, %178 : tensor<2x8x16xbf16>
    %180 = stablehlo.convert %179 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %181 = stablehlo.power %180, %5 : tensor<2x8x16xf64>
    %182 = stablehlo.reduce(%181 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %183 = stablehlo.reshape %182 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %184 = stablehlo.divide %183, %11 : tensor<2x8x1xf64>
    %185 = stablehlo.add %184, %15 : tensor<2x8x1xf64>
    %186 = stablehlo.rsqrt %185 : tensor<2x8x1xf64>
    %187 = stablehlo.broadcast_in_dim %186, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %188 = stablehlo.multiply %180, %187 : tensor<2x8x16xf64>
    %189 = stablehlo.convert %188 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %190 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %191 = stablehlo.reshape %189 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %192 = stablehlo.dot_general %191, %190, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %193 = stablehlo.reshape %192 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %194 = stablehlo.reshape %193 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %195 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %196 = stablehlo.dot_general %191, %195, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %197 = stablehlo.reshape %196 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %198 = stablehlo.reshape %197 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %199 = stablehlo.transpose %arg10, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %200 = stablehlo.dot_general %191, %199, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %201 = stablehlo.reshape %200 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %202 = stablehlo.reshape %201 : (tensor<2x8x16xbf16>) -> tensor<2x8x2x8xbf16>
    %203 = stablehlo.slice %194 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %204 = stablehlo.slice %194 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %205 = stablehlo.multiply %203, %50 : tensor<2x8x2x4xbf16>
    %206 = stablehlo.multiply %204, %52 : tensor<2x8x2x4xbf16>
    %207 = stablehlo.subtract %205, %206 : tensor<2x8x2x4xbf16>
    %208 = stablehlo.multiply %204, %50 : tensor<2x8x2x4xbf16>
    %209 = stablehlo.multiply %203, %52 : tensor<2x8x2x4xbf16>
    %210 = stablehlo.add %208, %209 : tensor<2x8x2x4xbf16>
    %211 = stablehlo.concatenate %207, %210, dim = 3 : (tensor<2x8x2x4xbf16>, tensor<2x8x2x4xbf16>) -> tensor<2x8x2x8xbf16>
    %212 = stablehlo.slice %198 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %213 = stablehlo.slice %198 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x4xbf16>
    %214 = stablehlo.multiply %212, %50 : tensor<2x8x2x4xbf16>
    %215 = stablehlo.multiply %213, %52 : tensor<2x8x2x4xbf16>
    %216 = stablehlo.subtract %214, %215 : tensor<2x8x2x4xbf16>
    %217 = stablehlo.multiply %213, %50 : tensor<2x8x2x4xbf16>
    %218 = stablehlo.multiply %212, %52 : tensor<2x8x2x4xbf16>
    %219 = stablehlo.add %217, %218 : tensor<2x8x2x4xbf16>
    %220 = stablehlo.concatenate %216, %219, dim = 3 : (tensor<2x8x2x4xbf16>, tensor<2x8x2x4xbf16>) -> tensor<2x8x2x8xbf16>
    %221 = stablehlo.convert %211 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x8xf64>
    %222 = stablehlo.power %221, %69 : tensor<2x8x2x8xf64>
    %223 = stablehlo.reduce(%222 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %224 = stablehlo.reshape %223 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %225 = stablehlo.divide %224, %75 : tensor<2x8x2x1xf64>
    %226 = stablehlo.add %225, %77 : tensor<2x8x2x1xf64>
    %227 = stablehlo.rsqrt %226 : tensor<2x8x2x1xf64>
    %228 = stablehlo.broadcast_in_dim %227, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %229 = stablehlo.multiply %221, %228 : tensor<2x8x2x8xf64>
    %230 = stablehlo.convert %229 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xbf16>
    %231 = stablehlo.convert %220 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x2x8xf64>
    %232 = stablehlo.power %231, %69 : tensor<2x8x2x8xf64>
    %233 = stablehlo.reduce(%232 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %234 = stablehlo.reshape %233 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %235 = stablehlo.divide %234, %75 : tensor<2x8x2x1xf64>
    %236 = stablehlo.add %235, %77 : tensor<2x8x2x1xf64>
    %237 = stablehlo.rsqrt %236 : tensor<2x8x2x1xf64>
    %238 = stablehlo.broadcast_in_dim %237, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %239 = stablehlo.multiply %231, %238 : tensor<2x8x2x8xf64>
    %240 = stablehlo.convert %239 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xbf16>
    %241 = stablehlo.transpose %230, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %242 = stablehlo.transpose %240, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %243 = stablehlo.transpose %202, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xbf16>) -> tensor<2x2x8x8xbf16>
    %244 = stablehlo.transpose %242, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %245 = stablehlo.reshape %241 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %246 = stablehlo.reshape %244 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %247 = stablehlo.broadcast_in_dim %246, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %248 = stablehlo.dot_general %245, %247, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %249 = stablehlo.reshape %248 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %250 = stablehlo.divide %249, %104 : tensor<2x2x8x8xbf16>
    %251 = stablehlo.broadcast_in_dim %250, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %252 = stablehlo.select %129, %130, %251 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xbf16>
    %253 = stablehlo.convert %252 : (tensor<2x2x8x8xbf16>) -> tensor<2x2x8x8xf32>
    %254 = stablehlo.reduce(%253 init: %cst_12) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %255 = stablehlo.reshape %254 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %256 = stablehlo.broadcast_in_dim %255, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %257 = stablehlo.subtract %253, %256 : tensor<2x2x8x8xf32>
    %258 = stablehlo.exponential %257 : tensor<2x2x8x8xf32>
    %259 = stablehlo.reduce(%258 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %260 = stablehlo.reshape %259 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %261 = stablehlo.broadcast_in_dim %260, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %262 = stablehlo.divide %258, %261 : tensor<2x2x8x8xf32>
    %263 = stablehlo.convert %262 : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xbf16>
    %264 = stablehlo.reshape %263 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %265 = stablehlo.reshape %243 : (tensor<2x2x8x8xbf16>) -> tensor<4x8x8xbf16>
    %266 = stablehlo.broadcast_in_dim %265, dims = [0, 1, 2] : (tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %267 = stablehlo.dot_general %264, %266, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xbf16>, tensor<4x8x8xbf16>) -> tensor<4x8x8xbf16>
    %268 = stablehlo.reshape %267 : (tensor<4x8x8xbf16>) -> tensor<2x2x8x8xbf16>
    %269 = stablehlo.transpose %268, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xbf16>) -> tensor<2x8x2x8xbf16>
    %270 = stablehlo.reshape %269 : (tensor<2x8x2x8xbf16>) -> tensor<2x8x16xbf16>
    %271 = stablehlo.transpose %arg11, dims = [1, 0] : (tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %272 = stablehlo.reshape %270 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %273 = stablehlo.dot_general %272, %271, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xbf16>
    %274 = stablehlo.reshape %273 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %275 = stablehlo.add %179, %274 : tensor<2x8x16xbf16>
    %276 = stablehlo.convert %275 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %277 = stablehlo.power %276, %5 : tensor<2x8x16xf64>
    %278 = stablehlo.reduce(%277 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %279 = stablehlo.reshape %278 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %280 = stablehlo.divide %279, %11 : tensor<2x8x1xf64>
    %281 = stablehlo.add %280, %15 : tensor<2x8x1xf64>
    %282 = stablehlo.rsqrt %281 : tensor<2x8x1xf64>
    %283 = stablehlo.broadcast_in_dim %282, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %284 = stablehlo.multiply %276, %283 : tensor<2x8x16xf64>
    %285 = stablehlo.convert %284 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %286 = stablehlo.transpose %arg12, dims = [1, 0] : (tensor<64x16xbf16>) -> tensor<16x64xbf16>
    %287 = stablehlo.reshape %285 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %288 = stablehlo.dot_general %287, %286, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x64xbf16>) -> tensor<16x64xbf16>
    %289 = stablehlo.reshape %288 : (tensor<16x64xbf16>) -> tensor<2x8x64xbf16>
    %290 = stablehlo.maximum %289, %cst_13 : tensor<2x8x64xbf16>
    %291 = stablehlo.power %290, %173 : tensor<2x8x64xbf16>
    %292 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<16x64xbf16>) -> tensor<64x16xbf16>
    %293 = stablehlo.reshape %291 : (tensor<2x8x64xbf16>) -> tensor<16x64xbf16>
    %294 = stablehlo.dot_general %293, %292, contracting_dims = [1] x [0] : (tensor<16x64xbf16>, tensor<64x16xbf16>) -> tensor<16x16xbf16>
    %295 = stablehlo.reshape %294 : (tensor<16x16xbf16>) -> tensor<2x8x16xbf16>
    %296 = stablehlo.add %275, %295 : tensor<2x8x16xbf16>
    %297 = stablehlo.convert %296 : (tensor<2x8x16xbf16>) -> tensor<2x8x16xf64>
    %298 = stablehlo.power %297, %5 : tensor<2x8x16xf64>
    %299 = stablehlo.reduce(%298 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %300 = stablehlo.reshape %299 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %301 = stablehlo.divide %300, %11 : tensor<2x8x1xf64>
    %302 = stablehlo.add %301, %15 : tensor<2x8x1xf64>
    %303 = stablehlo.rsqrt %302 : tensor<2x8x1xf64>
    %304 = stablehlo.broadcast_in_dim %303, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %305 = stablehlo.multiply %297, %304 : tensor<2x8x16xf64>
    %306 = stablehlo.convert %305 : (tensor<2x8x16xf64>) -> tensor<2x8x16xbf16>
    %307 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<32x16xbf16>) -> tensor<16x32xbf16>
    %308 = stablehlo.reshape %306 : (tensor<2x8x16xbf16>) -> tensor<16x16xbf16>
    %309 = stablehlo.dot_general %308, %307, contracting_dims = [1] x [0] : (tensor<16x16xbf16>, tensor<16x32xbf16>) -> tensor<16x32xbf16>
    %310 = stablehlo.reshape %309 : (tensor<16x32xbf16>) -> tensor<2x8x32xbf16>
    %311 = stablehlo.convert %cst_19 : (tensor<1xi64>) -> tensor<1xbf16>
    %312 = stablehlo.reshape %311 : (tensor<1xbf16>) -> tensor<bf16>
    %313 = stablehlo.broadcast_in_dim %312, dims = [] : (tensor<bf16>) -> tensor<2x8x32xbf16>
    %314 = stablehlo.divide %310, %313 : tensor<2x8x32xbf16>
    %315 = stablehlo.tanh %314 : tensor<2x8x32xbf16>
    %316 = stablehlo.multiply %315, %313 : tensor<2x8x32xbf16>
    %317 = stablehlo.reshape %316 : (tensor<2x8x32xbf16>) -> tensor<16x32xbf16>
    %318 = stablehlo.convert %317 : (tensor<16x32xbf16>) -> tensor<16x32xf32>
    %319 = stablehlo.reshape %arg15 : (tensor<2x8xi64>) -> tensor<16xi64>
    %320 = stablehlo.reduce(%318 init: %cst_12) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %321 = stablehlo.reshape %320 : (tensor<16xf32>) -> tensor<16x1xf32>
    %322 = stablehlo.broadcast_in_dim %321, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %323 = stablehlo.subtract %318, %322 : tensor<16x32xf32>
    %324 = stablehlo.exponential %323 : tensor<16x32xf32>
    %325 = stablehlo.reduce(%324 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %326 = stablehlo.reshape %325 : (tensor<16xf32>) -> tensor<16x1xf32>
    %327 = stablehlo.log %326 : tensor<16x1xf32>
    %328 = stablehlo.broadcast_in_dim %327, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %329 = stablehlo.subtract %323, %328 : tensor<16x32xf32>
    %330 = stablehlo.compare NE, %319, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %331 = stablehlo.broadcast_in_dim %330, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %332 = stablehlo.broadcast_in_dim %319, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %333 = stablehlo.select %331, %332, %c : tensor<16xi1>, tensor<16xi64>
    %334 = stablehlo.reshape %333 : (tensor<16xi64>) -> tensor<16x1xi64>
    %335 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %336 = stablehlo.reshape %334 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %337 = stablehlo.concatenate %335, %336, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %338 = "stablehlo.gather"(%329, %337) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %339 = stablehlo.reshape %338 : (tensor<16x1xf32>) -> tensor<16xf32>
    %340 = stablehlo.negate %339 : tensor<16xf32>
    %341 = stablehlo.broadcast_in_dim %340, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %342 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %343 = stablehlo.select %331, %341, %342 : tensor<16xi1>, tensor<16xf32>
    %344 = stablehlo.convert %330 : (tensor<16xi1>) -> tensor<16xi64>
    %345 = stablehlo.reduce(%344 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %346 = stablehlo.convert %345 : (tensor<i64>) -> tensor<f32>
    %347 = stablehlo.reduce(%343 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %348 = stablehlo.divide %347, %346 : tensor<f32>
    return %348 : tensor<f32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      torch_tensor_8_4_torch.bfloat16_1: "0x020000000000000000000000573FCC3D243C833A693F4B3EA43C033B113E973EF63C453B42BFC73E243D833B75BFF53E4D3DA43B8FBE113F763DC53B283F253F8F3DE53B",
      torch_tensor_8_4_torch.bfloat16: "0x02000000803F803F803F803F0A3F7F3F803F803FD5BE7B3F803F803F7DBF753F803F803F27BF6C3F803F803F913E613F803F803F763F533F803F803F413F443F7F3F803F"
    }
  }
#-}

